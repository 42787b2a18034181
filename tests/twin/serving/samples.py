"""Lines of published traces, and what they say: seconds, prompt and output tokens."""

from msgspec import Struct

Said = tuple[float, int, int]


class Sample(Struct, frozen=True):
    """Lines, and the requests in them."""

    text: str
    said: list[Said]


CONVERSATIONS = [(0.0, 374, 44), (4.314579, 396, 109), (4.541877, 879, 55)]
TRACES = {
    # github.com/Azure/AzurePublicDataset data/AzureLLMInferenceTrace_conv.csv, whose lines end so
    "azure 2023": Sample(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:51.2224670,879,55",
        CONVERSATIONS,
    ),
    # the first rows of the week of code of 2024, as analysis/AzureLLMInferenceDataset2024.ipynb there shows them
    "azure 2024": Sample(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
        "2024-05-10 00:00:00.017335+00:00,2399,6\n2024-05-10 00:00:00.022314+00:00,76,15\n",
        [(0.0, 2162, 5), (0.007405, 2399, 6), (0.012384, 76, 15)],
    ),
    # github.com/HPMLL/BurstGPT data/BurstGPT_1.csv
    "burstgpt": Sample(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n",
        [(0.0, 472, 18), (40.0, 1087, 230)],
    ),
    # the same, release v2.0: BurstGPT_3.csv
    "burstgpt sessions": Sample(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "19440110.0,1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,906,446,1352,Conversation log\n"
        "19440161.0,d5983bf9-4b48-497b-892b-a58995247443,2,ChatGPT,36,29,65,Conversation log\n",
        [(0.0, 906, 446), (51.0, 36, 29)],
    ),
    # github.com/Mutinifni/splitwise-sim traces/test_trace.csv
    "splitwise": Sample(
        "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
        "0,2,0,1,1,4096,32\n1,2,0,3,1,2048,8\n2,2,0,4,1,2048,16\n",
        [(0.0, 4096, 32), (2.0, 2048, 8), (3.0, 2048, 16)],
    ),
    # github.com/microsoft/vidur data/processed_traces/splitwise_conv.csv: the first of these once more
    "vidur": Sample(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.314579,396,109\n4.541877,879,55\n",
        CONVERSATIONS,
    ),
    # github.com/kvcache-ai/Mooncake FAST25-release/traces/conversation_trace.jsonl, lines 14, 17 and 27
    "mooncake": Sample(
        '{"timestamp": 3000, "input_length": 2012, "output_length": 354, "hash_ids": [0, 427, 428, 429]}\n'
        '{"timestamp": 3000, "input_length": 915, "output_length": 355, "hash_ids": [0, 462]}\n'
        '{"timestamp": 5999, "input_length": 1053, "output_length": 26, "hash_ids": [0, 773, 774]}\n',
        [(0.0, 2012, 354), (0.0, 915, 355), (2.999, 1053, 26)],
    ),
    # the record of the README of github.com/alibaba-edu/qwen-bailian-usagetraces-anon, with hashes in place of dots
    "bailian": Sample(
        '{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132, '
        f'"type": "text", "turn": 2, "hash_ids": {list(range(33))}}}\n',
        [(0.0, 521, 132)],
    ),
}
PROMPTS = {
    # github.com/vllm-project/vllm vllm/benchmarks/datasets.py, at `CustomDataset`
    "vllm": Sample(
        '{"prompt": "What is the capital of India?", "output_tokens": 10}\n'
        '{"prompt": "What is the capital of Iran?", "output_tokens": 1520}\n',
        [(0.0, 7, 10), (0.5, 7, 1520)],
    ),
    # the same, examples/offline_inference/openai_batch/openai_example_batch.jsonl
    "openai": Sample(
        '{"custom_id": "request-1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": '
        '"meta-llama/Meta-Llama-3-8B-Instruct", "messages": [{"role": "system", "content": "You are a helpful '
        'assistant."},{"role": "user", "content": "Hello world!"}],"max_completion_tokens": 1000}}\n',
        [(0.0, 10, 1000)],
    ),
    # made up: the keys are those that vLLM's benchmark reads
    "sharegpt": Sample(
        '[\n  {"id": "a_0", "conversations": [{"from": "human", "value": "Who are you?"}, '
        '{"from": "gpt", "value": "A model."}]},\n  {"id": "a_1", "conversations": []}\n]\n',
        [(0.0, 3, 2)],
    ),
}
