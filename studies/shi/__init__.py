"""Shi (2019): parameter server against ring all-reduce on CIFAR-10."""
