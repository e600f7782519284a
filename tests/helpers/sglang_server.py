"""A small HTTP server that speaks SGLang's native API, answering from a Hugging Face model: `python sglang_server.py --model-path ...`.

It takes the arguments of sglang.launch_server that our engine passes, and answers one request at a time. What it was asked is in
`calls.jsonl` in the model's folder. With `--canned-s` it has no model, and says the same to everything after so many seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--model-path", "--host", "--device", "--dtype", "--log-level", "--random-seed", "--max-running-requests"):
        parser.add_argument(name, required=True)
    for name in ("--chunked-prefill-size", "--mem-fraction-static"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--canned-s", type=float)
    for name in ("--skip-tokenizer-init", "--disable-cuda-graph", "--enable-memory-saver"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    Handler.options, Handler.model = options, load(options.model_path) if options.canned_s is None else None
    HTTPServer((options.host, options.port), Handler).serve_forever()


def load(path: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


class Handler(BaseHTTPRequestHandler):
    options: Any
    model: Any

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/health" else 404, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with (Path(self.options.model_path) / "calls.jsonl").open("a") as file:
            file.write(json.dumps([self.path, body]) + "\n")
        if self.path == "/generate":
            self._answer(200, self._generate(body["input_ids"], body["sampling_params"]))
        elif self.path == "/update_weights_from_disk":
            try:
                type(self).model = load(body["model_path"])
            except (OSError, ValueError) as error:
                self._answer(400, {"success": False, "message": str(error)})
            else:
                self._answer(200, {"success": True, "message": "Succeeded to update model weights."})
        elif self.path in ("/flush_cache", "/abort_request", "/release_memory_occupation", "/resume_memory_occupation"):
            self._answer(200, "Done.\n")
        else:
            self._answer(404, {"detail": "Not Found"})

    def _generate(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        if self.model is not None:
            return generate(self.model, prompt, params)
        time.sleep(self.options.canned_s)
        tokens = [[-1.0, 5, None]] * params["max_new_tokens"]
        meta = {"finish_reason": {"type": "length"}, "completion_tokens": len(tokens), "output_token_logprobs": tokens}
        return {"output_ids": [5] * len(tokens), "meta_info": meta}

    def _answer(self, status: int, body: Any) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


def generate(model: Any, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Log-probs are those after temperature and penalty, before top-k: SGLang's."""
    import torch

    generator = torch.Generator().manual_seed(params["sampling_seed"])
    ids, tokens, reason = list(prompt), [], {"type": "length", "length": params["max_new_tokens"]}
    while len(tokens) < params["max_new_tokens"]:
        logits = model(torch.tensor([ids])).logits[0, -1].detach()
        seen = torch.tensor(ids).unique()
        penalty = params["repetition_penalty"]
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        log_probs = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
        if params["temperature"] == 0:
            token = int(log_probs.argmax())
        else:
            kept = log_probs.exp()
            if params["top_k"] > 0:
                kept[kept < kept.topk(params["top_k"]).values[-1]] = 0.0
            token = int(torch.multinomial(kept, 1, generator=generator))
        tokens.append([float(log_probs[token]), token, None])
        ids.append(token)
        if token in params["stop_token_ids"]:
            reason = {"type": "stop", "matched": token}
            break
    meta = {"finish_reason": reason, "completion_tokens": len(tokens), "output_token_logprobs": tokens}
    return {"output_ids": ids[len(prompt) :], "meta_info": meta}


if __name__ == "__main__":
    main()
