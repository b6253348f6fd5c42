"""The key-value store where ranks and nodes meet, for those alone who know the job's secret.

`address` finds where it listens, `secret` what its members know, `channel` proves and seals,
`server` keeps the keys, `client` is a `torch.distributed.Store`. Nothing here needs torch but the
client.

[Note: who takes part] torch's own store asks nobody for a password, and what is in it decides which
code a job runs. So both ends of each connection prove that they know the job's secret before either
reads a request, without sending it (HMAC-SHA256 of fresh random numbers), and every frame
afterwards carries a code over its content and its number, under a key of this connection and
direction: forged, altered, repeated, reordered and cut frames end the connection. Values are not
encrypted. On one node the store listens on a Unix socket in a private folder, and no port is
opened.
"""
