"""`paceline run`: any script of torch.distributed, started, watched and ended on one or many hosts.

sources      which files of the user belong to a script, and whether hosts have the same
counting     how many ranks a machine gets, and which cores and threads each of them
supervision  the ranks of one machine: started, listened to, watched, ended together
begin        what a rank runs: it becomes the script, and ends when Gloo's threads are done
output       what a rank prints: its log, and whole lines for whoever watches
family       the processes that ranks have started: how busy they are, and that none stays
screen       what a person sees of all ranks, and which failure came first
host_part    what an agent starts on each host
on_hosts     the launcher's side where there are several hosts
"""
