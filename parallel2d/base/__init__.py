"""What everything stands on: configuration, errors, files, the process group, which rank and host
this process is on, the authenticated store. Nothing here knows of models."""
