"""Speed and quality beside peers: ``all.py`` measures it all, ``RESULTS.md`` has the figures."""
