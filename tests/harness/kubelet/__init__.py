"""A stand-in for the kubelet, kube-proxy and cluster DNS of one node, for a control plane that has none.

It runs the real commands of the pods that the scheduler binds to its node. Each container has mount, PID and
network namespaces as a container runtime would make them, but there is no container runtime. An image is a
table entry that says which folders of this machine it shows and which program it starts (`images`). `running`
starts it from a test. Everything is in namespaces that end with the kubelet's process, so the kernel cleans
up after a crash.

    running    for tests: start a node, look into its network, kill containers
    __main__   the program: node, lease, watch of pods
    pod        one pod: sandbox, order of containers, status
    container  one container: process, probes, restarts, hooks
    probes, volumes, variables   the parts of a pod's spec
    services   ClusterIPs and names
    namespaces, launch           the parts that call the kernel
    api        the part of the Kubernetes API that it needs
"""
