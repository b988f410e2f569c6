"What every layer may use: files, errors, fields of settings, what a model's layers are."
