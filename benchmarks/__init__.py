"""``python -m benchmarks`` times steps; ``python -m benchmarks.<claim>`` checks one claim."""
