"""A stand-in for the kubelet, kube-proxy and cluster DNS of one node, for a control plane that has none.

It runs the real commands of the pods that the scheduler binds to its node, each container in mount, PID and
network namespaces like those a container runtime would make, with no container runtime and no images: an
image is a table entry that says which folders of this machine it shows and which program it starts
(`images`). `running` starts it from a test. Everything lives in namespaces that end with the kubelet's
process, so the kernel cleans up after a crash.

    running    for tests: start a node, look into its network, kill containers
    __main__   the program: node, lease, watch of pods
    pod        one pod: sandbox, order of containers, status
    container  one container: process, probes, restarts, hooks
    probes, volumes, variables   what a pod's spec says of them
    services   ClusterIPs and names
    namespaces, launch           the kernel's part
    api        the little of the Kubernetes API that it needs
"""
