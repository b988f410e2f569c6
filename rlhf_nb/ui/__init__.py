"What one sees: views in a notebook, pages that need no kernel, and what they share."
