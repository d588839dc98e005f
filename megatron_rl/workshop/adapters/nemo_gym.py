"""Adapter for NeMo Gym's agents over HTTP (POST /run with a row, the reward in the reply); run as a
program, a relay between its model server, which has one address for all rollouts, and the gateway,
where each session has its own.

Start `python -m megatron_rl.workshop.adapters.nemo_gym PORT`, with `policy_base_url:
http://127.0.0.1:PORT/v1` in NeMo Gym's configuration. Which session a request belongs to stands in
the `metadata` of its parameters.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import aiohttp
from aiohttp import web

from megatron_rl.environments.environment import as_messages
from megatron_rl.rewards.functions import for_metrics

# in the metadata
URL = "policy_base_url"
KEY = "policy_api_key"
LARGEST = 32 << 20


class Agent:
    """Has the agent server at `url` play each row. `params`: responses_create_params for rows that
    have none.
    """

    def __init__(self, url: str, params: Mapping[str, Any] | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/run")
        self._params = dict(params or {})

    async def run(self, base_url: str, row: Mapping[str, Any]) -> dict[str, float]:
        params = row.get("responses_create_params") or {"input": as_messages(row["prompt"])}
        params = {**self._params, **(json.loads(params) if isinstance(params, str) else params)}
        session = {URL: base_url, KEY: os.environ["OPENAI_API_KEY"]}
        params["metadata"] = {**(params.get("metadata") or {}), **session}
        body = {**row, "responses_create_params": params}
        timeout = aiohttp.ClientTimeout(total=None)  # environment.session_timeout_s ends it
        async with (
            aiohttp.ClientSession(timeout=timeout) as client,
            client.post(f"{self._url}/run", json=body) as response,
        ):
            if response.status >= 400:
                raise RuntimeError(
                    f"{self._url}/run: {response.status} {(await response.text())[:300]}"
                )
            reply = await response.json()
        return {**for_metrics(reply.get("reward_components")), "reward": float(reply["reward"])}


async def relayed(request: web.Request) -> web.Response:
    """A request of NeMo Gym's model server, sent to the gateway of its session."""
    body = await request.json()
    metadata = body.pop("metadata", None) or {}
    body.pop("model", None)  # as NeMo Gym's configuration calls it
    url = metadata.get(URL, "")
    key = metadata.get(KEY, "")
    if not url.startswith("http://127.0.0.1:"):
        return web.json_response(
            {"error": {"message": f"metadata has no {URL} of a gateway"}}, status=400
        )
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client,
        client.post(f"{url}/chat/completions", json=body, headers=headers) as response,
    ):
        return web.Response(
            body=await response.read(), status=response.status, content_type="application/json"
        )


def relay() -> web.Application:
    application = web.Application(client_max_size=LARGEST)
    application.router.add_post("/v1/chat/completions", relayed)
    return application


if __name__ == "__main__":
    web.run_app(
        relay(), host="127.0.0.1", port=int(sys.argv[1]), print=None, handler_cancellation=True
    )
