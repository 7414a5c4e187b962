"""Generate from a bundle with the Python API: `python examples/generate.py BUNDLE`."""

import sys

from dspark.runtime import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)
llm = LLM(sys.argv[1])
question = "Tom shares 27 candles equally among 9 friends. How many candles does each friend get?"
question += "\nPlease reason step by step, and put your final answer within \\boxed{}."
chat = [{"role": "user", "content": question}]

(output,) = llm.generate([chat], SamplingParams(max_tokens=160, temperature=0))
print(output.text)
print("finish:", output.finish_reason)
print("tokens of each round:", output.stats.accepted_per_round)

for piece in llm.stream(chat, SamplingParams(max_tokens=160)):
    print(piece.text, end="", flush=True)
print()
