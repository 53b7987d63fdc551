"""Speed and quality, measured beside peers: ``all.py`` runs it all, ``RESULTS.md`` has the figures."""
