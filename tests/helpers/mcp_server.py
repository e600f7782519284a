"""A real MCP server on stdin and stdout: counts, fails, dies, hangs. `python mcp_server.py [late]`."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
count = 0


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def calls() -> str:
    """How many calls this server has had."""
    global count
    count += 1
    return f"call {count}"


@server.tool()
def fails() -> str:
    """Raises."""
    raise ToolError("no such thing")


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(3)


@server.tool()
def hangs() -> str:
    """Never answers."""
    time.sleep(600)
    return ""


if sys.argv[1:] == ["late"]:
    time.sleep(600)
server.run("stdio")
