"The plumbing under the pages: files, and what is read from the insides of libraries."
