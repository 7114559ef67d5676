"""The experiments of the papers, one package each."""
