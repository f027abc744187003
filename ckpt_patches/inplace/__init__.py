"""Write fixes into the files of a tree, and remove them again; uses the engine and durable writes."""
