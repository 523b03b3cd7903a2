"""Looking at trainings while they run: a follower of their files, a page, a terminal."""
