"""Text that the model writes: at each validation (`sample_prompts`), and at the end of a launch."""

from basics.errors import describe
from basics.files import append_whole
from basics.json_files import to_json
from checkpointing import TrainingState
from reporting.clock import VALIDATION
from reporting.run_log import Report, RunLog
from reporting.sampling import LONG_SAMPLE, SAMPLE_TOKENS, SamplingOptions, stream_text
from tokens.tokenizer import encode_prompt, load_tokenizer
from trainer.launch import Launch
from trainer.observer import Observer
from trainer.precision import autocast


class Samples(Observer):
    """Writes `samples.jsonl` and prints a sample at the end; what fails is only a warning.

    It sends a heartbeat for each token.
    """

    def __init__(self, launch: Launch, state: TrainingState, log: RunLog) -> None:
        self._launch, self._state, self._log = launch, state, log

    def validation(self, report: Report) -> None:
        """Append a JSON line with the continuation of each prompt."""
        prompts = self._launch.config.sample_prompts
        if not prompts:
            return
        options, lines = SamplingOptions(SAMPLE_TOKENS), ""
        with self._launch.clock.phase(VALIDATION):
            try:
                for prompt in prompts:
                    text = self.text(prompt, options)
                    sample = {"global_step": report.global_step, "prompt": prompt, "text": text}
                    lines += to_json(sample) + "\n"
                append_whole(self._launch.run.samples_path, lines)
            except Exception as error:
                self._log.warn("no samples", describe(error))
            finally:
                self._state.model.train()

    def close(self) -> None:
        """Print a sample, of the first prompt."""
        prompts = self._launch.config.sample_prompts
        # The notice of a preemption may be 30 s long.
        if self._launch.watchdog.stop_signal or prompts == ():
            return
        if self._launch.data.tokenizer_name is None:
            return
        prompt = prompts[0] if prompts else ""
        try:
            self._log.say(f"sample:\n{prompt}{self.text(prompt)}")
        except Exception as error:
            self._log.say(f"warning: no sample: {describe(error)}")

    def text(self, prompt: str = "", options: SamplingOptions = LONG_SAMPLE) -> str:
        data, model, text = self._launch.data, self._state.model, ""
        tokenizer = load_tokenizer(data.tokenizer_name or "", data.tokenizer_path)
        prompt_ids = encode_prompt(tokenizer, prompt)
        with autocast(self._launch.config.precision, self._launch.process.device):
            for piece in stream_text(model, tokenizer, prompt_ids, options):
                self._launch.watchdog.heartbeat()
                text += piece
        return text
