"""The arithmetic and the files that everything else stands on. Not for users: nothing is exported.

`layout` lays a model's tensors over one flat vector, `batch` handles samples of several tensors,
`validate` says what an update must be, `aggregate` and `gram` add updates up and measure them,
`checkpoint` writes and reads a state, `memory` keeps what clients remember, `processes` runs
workers, `malloc` sets the allocator, `lazy` loads names when they are used, `user_code` those of
users' modules, `checks` refuses settings. May import records and rng alone.
"""
