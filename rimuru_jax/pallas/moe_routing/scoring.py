"""What a router is asked for: how the scores of experts become a choice and weights."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How K experts of a token are chosen from its logits, and weighed."""

    normalize: bool
    """Divide the chosen scores by their sum plus `normalize_epsilon`."""
    function: str = "softmax"
    """"softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen": the best logits are chosen and the softmax
    runs over them alone."""
    num_groups: int = 1
    """Equal groups that the experts form."""
    top_groups: int = 1
    """Groups, those with the largest sums of two best (biased) scores, whose experts can be chosen."""
    normalize_epsilon: float = 0.0
    scale: float = 1.0
    """Factor of the weights."""

    def check(self, experts: int, top_k: int) -> None:
        """Raise ValueError where `top_k` of so many experts cannot be chosen like this."""
        if not 1 <= top_k <= experts:
            raise ValueError(f"{top_k} experts per token asked of {experts} experts")
        if self.function not in ("softmax", "sigmoid", "softmax_of_chosen"):
            raise ValueError(
                f"scoring is {self.function!r}, it must be 'softmax', 'sigmoid' or 'softmax_of_chosen'"
            )
        if experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{experts} experts cannot be chosen from {self.top_groups} of {self.num_groups} groups"
            )
        size = experts // self.num_groups
        if top_k > size * self.top_groups:
            raise ValueError(f"{top_k} experts per token do not fit into {self.top_groups} groups of {size}")
