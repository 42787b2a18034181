"""Integer and logic operations a second over all lanes of a GPU: what taking codes apart is made of."""

from calibrate.probes.probe import Context, Probe, Sample, check, cuda_only


def instructions(context: Context) -> list[Sample]:
    """Chains of lop3 and shf in registers, many a thread, so that no result is waited for."""
    from calibrate.probes.instruction_kernels import CHAINS, Chains  # noqa: PLC0415 - needs triton

    samples = []
    for chains in context.points(context.pick(CHAINS[-1:], CHAINS)):
        timed = Chains(chains=chains, device=context.backend.device)
        timed.run()
        how = check("instructions", timed.right(), "every chain as computed on the host")
        seconds = context.seconds(context.backend.capture(timed.run))
        at: dict[str, int | float | str] = {"chains": chains, "programs": timed.programs, "steps": timed.steps}
        samples.append(Sample(at=at, seconds=seconds, flops=timed.operations, checked=how))
        del timed
    return samples


PROBES = (Probe(name="instructions", run=instructions, supported=cuda_only, quick_s=1.5, full_s=3),)
