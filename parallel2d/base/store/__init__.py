"""Authenticated key-value store for ranks and nodes that have the job's secret.

The module `server` stores the keys, and `client` has a `torch.distributed.Store`. `address`
resolves the address of the server, and `secret` reads the secret of a job. `channel` authenticates
connections and frames. Only the client needs torch.

[Note: mutual authentication] torch's own store needs no password, and its values decide which code
a job runs. In this store, both ends of a connection first prove that they have the job's secret.
Each end sends an HMAC-SHA256 of new random numbers, and never the secret. Requests are read only
after both proofs. Every later frame carries an authentication code of its content and its number;
the key of the code is different for each connection and direction. A forged, altered, repeated,
reordered or truncated frame ends the connection. Values are not encrypted. On one node the store
listens on a Unix socket in a private folder, and opens no port.
"""
