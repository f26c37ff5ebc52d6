// Package sandbox runs a hub, a spoke, and all of this project's components on one machine, without
// containers. The control planes are real and run as child processes; the machines are simulated.
//
//	hub                                            spoke
//	 hub-etcd, hub-apiserver                        spoke-etcd, spoke-apiserver
//	 hub-controller-manager (garbage collection)    spoke-controller-manager, spoke-scheduler
//	 cluster-api (the real manager, its webhooks)   spoke-kwok (heartbeats and pods of the Nodes)
//	 sim-provider (infrastructure provider)         shim (Karpenter)
//	 agent
//
// The hub holds one Cluster, [ClusterNamespace]/[ClusterName], whose control plane is the spoke. It
// holds no MachineDeployments. Users of the sandbox create them from SimMachineTemplates (package
// api/v1alpha1), which also determine how the machines behave. The example in
// examples/machinedeployment.yaml works unchanged.
//
// With [Options].HubOnly there is only a hub, without a Cluster. Another sandbox's Cluster can be
// moved to it with `clusterctl move`, and that sandbox's shim can be pointed to its agent with
// [Sandbox.PointShim].
//
// With [Options].HubOf there is only a spoke with its shim, whose Cluster is added to the hub of
// another sandbox.
//
// # Fidelity
//
// Agent and shim are separate processes that use mTLS. Each has a ServiceAccount token that is
// bound to exactly the roles that the Helm charts grant. Cluster API runs with its admission and
// conversion webhooks. Only the machine and its kubelet are simulated. The provider keeps Cluster
// API's contract: it waits, hangs and fails where a real one does, and it recognises an instance
// whose object was moved. It registers Nodes as kubelets do, and stops them with their machine.
// Everything else is Kubernetes itself, such as the garbage collection of Nodes' pods or the taint
// of an unresponsive Node.
//
// # Processes
//
// Every component is restarted after it dies, with a short and growing delay, so that it may be
// killed by hand or with [Sandbox.Kill]. [Sandbox.StopComponent] keeps it stopped. No process
// outlives the one that called [Start], even if that is killed without a chance to clean up (on
// Linux). All servers listen on loopback only, on free ports, so that any number of sandboxes with
// different names can run at once. Each sandbox keeps its state in one folder ([Paths]).
//
// The binaries are built by `make tools build`. [Start] reports which are missing.
package sandbox
