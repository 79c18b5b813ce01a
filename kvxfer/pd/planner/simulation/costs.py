"""The costs of an engine's steps, laid out for speed: what `StepModel.step_s` says, by table."""

from kvxfer.pd.planner.engine_model import StepModel


class StepCosts:
    """Costs of one engine; ``decode_s[B]`` is ``d(B)`` up to ``most_sequences``."""

    __slots__ = ("_chunks_base_s", "context_s", "decode_s", "pair_s", "token_s")

    def __init__(self, steps: StepModel, most_sequences: int) -> None:
        """Tabulate."""
        self.decode_s = [steps.decode_s(count) for count in range(most_sequences + 1)]
        self.context_s = steps.context_s
        self.token_s = steps.token_s
        self.pair_s = steps.pair_s
        self._chunks_base_s = steps.prefill_base_s - steps.decode[0].step_s

    def step_s(
        self, num_decoding: int, num_context: int, num_prompt_tokens: int, num_pairs: float
    ) -> float:
        """As `StepModel.step_s`."""
        decode_s = self.decode_s[num_decoding] + self.context_s * num_context
        if not num_prompt_tokens:
            return decode_s
        chunks_s = self.token_s * num_prompt_tokens + self.pair_s * num_pairs
        return self._chunks_base_s + chunks_s + decode_s
