"""A local stand-in for the HTTP interface of the Hugging Face hub: enough for create, upload, info and download."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """A hub that accepts one token and keeps repositories in memory.

    Attributes:
        repositories: Files by name, by repository.
        seen: Method, path and Authorization header of every request.
    """

    daemon_threads = True

    def __init__(self, token):
        super().__init__(("127.0.0.1", 0), Handler)
        self.token, self.repositories, self.seen, self.large = token, {}, [], {}
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, code, value=None, body=b"", **headers):
        if value is not None:
            body, headers["Content-Type"] = json.dumps(value).encode(), "application/json"
        self.send_response(code)
        for name, text in {**headers, "Content-Length": str(headers.pop("length", len(body)))}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def route(self):
        content = self.body()
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.seen.append((self.command, path, self.headers.get("Authorization")))
        parts = path.strip("/").split("/")
        writes = self.command in ("POST", "PUT")
        if writes and parts[-1] != "batch" and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self.answer(401, {"error": "Invalid credentials in Authorization header"})
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked.get('organization') or 'ada'}/{asked['name'].rpartition('/')[2]}"
            hub.repositories.setdefault(name, {})
            return self.answer(200, {"url": f"{hub.address}/{name}", "name": name, "id": name})
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": "ada", "type": "user", "orgs": []})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        name = "/".join(parts[2:4] if parts[0] == "api" else parts[:2]).removesuffix(".git")
        files = hub.repositories.get(name)
        if files is None:
            return self.answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        if "preupload" in parts:
            wanted = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                for one in json.loads(content)["files"]
            ]
            return self.answer(200, {"files": wanted, "commitOid": commit})
        if "commit" in parts:
            for line in content.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            return self.answer(
                200, {"commitUrl": f"{hub.address}/{name}/commit/1", "commitOid": commit, "success": True}
            )
        if "tree" in parts:
            tree = [{"type": "file", "path": file, "size": len(data), "oid": "0" * 40} for file, data in files.items()]
            return self.answer(200, tree)
        if parts[0] == "api":
            siblings = [{"rfilename": file} for file in files]
            return self.answer(
                200, {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "private": False, "tags": []}
            )
        file = "/".join(parts[4:])
        if file not in files:
            return self.answer(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        data = files[file]
        tag = f'"{hashlib.sha1(data).hexdigest()}"'
        return self.answer(200, body=data, ETag=tag, X_Repo_Commit=commit, length=len(data))

    do_GET = do_HEAD = do_POST = do_PUT = route
