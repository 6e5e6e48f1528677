"""Results of many hosts: who disagrees with whom, who is slow, what adds up over time, and whom to pair with whom."""
