"""Other libraries' interfaces over the engine: scripts written for them run without the library; nothing in Mezzo imports them."""
