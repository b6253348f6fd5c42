"""The key-value store through which ranks and nodes exchange values, for those alone who have the
job's secret.

`server` keeps the keys, and `client` is a `torch.distributed.Store`. `address` finds where the
server listens, `secret` reads the secret of a job, `channel` proves it and seals frames. Only the
client needs torch.

[Note: who takes part] torch's own store needs no password, and what is in it decides which code a
job runs. So both ends of each connection prove that they have the job's secret before either reads
a request, without sending it (HMAC-SHA256 of fresh random numbers). Every frame afterwards carries
a code over its content and its number, under a key of this connection and direction: forged,
altered, repeated, reordered and cut frames end the connection. Values are not encrypted. On one
node the store listens on a Unix socket in a private folder, and no port is opened.
"""
