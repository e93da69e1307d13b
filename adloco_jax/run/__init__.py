"""The host loop and what it needs: config, controller, programs, evaluation, ledger."""
