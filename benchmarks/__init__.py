"""The main job, small reproductions and speed."""
