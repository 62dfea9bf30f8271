"""Grammars of clients, compiled where they can be stopped."""

import asyncio
import json
import sys

from rimuru_jax.sampling_params import StructuredOutputsParams
from rimuru_jax.server.refusals import RefusedError
from rimuru_jax.structured_output import PARSER_LIMITS, GrammarCompiler

SECONDS = 10.0
"""What compiling one grammar may take."""
_BYTES = 4 << 30
_AT_ONCE = 2

_TRIAL = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
from llguidance import LLMatcher, LLParserLimits
definition = sys.stdin.buffer.read().decode()
LLMatcher.validate_grammar(definition, None, limits=LLParserLimits(**json.loads(sys.argv[2])))
"""


class GrammarCheck:
    """Compiles new grammars in a process of their own first.

    A schema of a few hundred bytes can take for ever to compile (many `allOf` patterns, large `multipleOf`), and a thread
    that does so cannot be stopped. What passes is compiled again in a thread, where the engine finds it.
    """

    def __init__(self, compiler: GrammarCompiler, seconds: float = SECONDS) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, params: StructuredOutputsParams | None) -> None:
        """Raises RefusedError, in one sentence, for what is no grammar or takes too long to become one."""
        if params is None:
            return
        try:
            definition = await asyncio.to_thread(self._compiler.definition, params)
            if definition not in self._compiler:
                async with self._slots:
                    await self._trial(definition)
                    await asyncio.to_thread(self._compiler.compile, params)
        except ValueError as error:
            raise RefusedError(400, str(error)) from error

    async def _trial(self, text: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-c", _TRIAL, str(_BYTES), json.dumps(PARSER_LIMITS),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(self._seconds):
                await process.communicate(text.encode())
        except TimeoutError:
            raise ValueError(
                f"structured_outputs cannot be used: it was not compiled within {self._seconds:g} s"
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:  # whatever is merely wrong with a grammar does not end the process like this
            raise ValueError("structured_outputs cannot be used: compiling it takes too much memory")
