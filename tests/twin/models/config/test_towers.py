"""Towers: parameters to the unit, apart from the language model's."""

import pytest

from tests.twin.models.config.counted import Counted, counted, one, spec, total
from twin.errors import BadFile
from twin.models.config.towers import towers_of
from twin.models.fields import Fields


@pytest.mark.parametrize("row", counted("towers"), ids=lambda row: row.name)
def test_a_tower_is_counted_apart_from_the_language_model(row: Counted) -> None:
    assert sum(spec(row.config).towers.values()) == row.towers
    assert total(row.config) == row.parameters


def test_images_and_sound_have_a_tower_each() -> None:
    both, one_less = spec(one("towers", "gemma4sound")), spec(one("towers", "gemma4clipped"))
    assert both.towers.keys() == {"vision", "audio"}
    assert both.towers["vision"] == one_less.towers["vision"]


def test_kimi_k2_5_joins_its_tower_to_7168_channels() -> None:
    vision = {"vt_hidden_size": 1152, "vt_intermediate_size": 4304, "vt_num_hidden_layers": 27, "patch_size": 14}
    vision |= {"init_pos_emb_height": 64, "init_pos_emb_width": 64, "mm_hidden_size": 1152}
    outer = {"architectures": ["KimiK25ForConditionalGeneration"]}
    outer["vision_config"] = vision | {"merge_kernel_size": [2, 2]}  # type: ignore[assignment]
    assert towers_of(Fields(outer, "config.json"), 7168) == {"vision": 471143920}


def test_gemma_3n_has_the_audio_tower_of_its_class_and_an_encoder_that_it_names() -> None:
    """`Gemma3nAudioEncoder` has 681,348,640 parameters at its defaults, which published files write down."""
    outer = {"architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"hidden_size": 1536}}
    outer["vision_config"] = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048}
    joined = {"vision": 128 * 2048 + 2 * 2048 + 2048 * 2048, "audio": 128 * 1536 + 2 * 1536 + 1536 * 2048}
    assert towers_of(Fields(outer, "config.json"), 2048) == {
        "vision": 294_126_912 + joined["vision"],
        "audio": 681_348_640 + joined["audio"],
    }
    outer["vision_config"] = {"architecture": "resnet50"}
    with pytest.raises(BadFile, match=r"vision_config\.architecture: is 'resnet50', which is not known"):
        towers_of(Fields(outer, "config.json"), 2048)


def test_a_file_without_a_tower_and_one_with_a_tower_that_is_not_known() -> None:
    config = one("towers", "gemma3")
    assert spec({key: value for key, value in config.items() if key != "vision_config"}).towers == {}
    unknown = {"architectures": ["OddForConditionalGeneration"], "vision_config": {"hidden_size": 8}}
    fields = Fields(unknown, "config.json")
    assert towers_of(fields, 64) == {}
    assert "vision_config" in fields.ignored()


def test_a_known_tower_that_lacks_a_size_is_refused_by_name() -> None:
    config = one("towers", "gemma3")
    vision = {key: value for key, value in config["vision_config"].items() if key != "patch_size"}
    with pytest.raises(BadFile, match=r"vision_config\.patch_size is missing"):
        spec(config | {"vision_config": vision})
