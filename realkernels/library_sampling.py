"""One token from each row of logits, as a serving engine draws it: softmax, exponential noise, the largest share."""

import torch

TEMPERATURE = 0.8


class LibrarySampling:
    """Rows of fp32 logits over a vocabulary; the draw is the argmax of share over noise, which needs no sum twice."""

    def __init__(self, *, rows: int, vocab: int, device: torch.device) -> None:
        self.logits = torch.randn(rows, vocab, device=device)
        self.noise = torch.empty_like(self.logits)
        self.tokens = torch.empty(rows, dtype=torch.long, device=device)

    def run(self) -> None:
        """Scale, softmax, noise, argmax."""
        shares = torch.softmax(self.logits / TEMPERATURE, dim=1)
        self.noise.exponential_()
        torch.argmax(shares.div_(self.noise), dim=1, out=self.tokens)

    def poison(self) -> None:
        """Tokens that no vocabulary has."""
        self.tokens.fill_(-1)

    def finite(self) -> bool:
        """Whether every row has a token."""
        return bool((self.tokens >= 0).all())

    def verify(self) -> float:
        """Largest relative shortfall of a drawn token's weight, in float64, from the row's largest."""
        self.logits.normal_()
        self.poison()
        self.run()
        if not self.finite():
            return float("inf")
        weights = torch.softmax(self.logits.double() / TEMPERATURE, dim=1) / self.noise.double()
        drawn = weights.gather(1, self.tokens[:, None])[:, 0]
        return float((1 - drawn / weights.amax(dim=1)).max())
