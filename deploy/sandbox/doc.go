// Package sandbox runs a hub, a spoke and everything of ours between them on one machine, without containers: real
// control planes as child processes, machines that are simulated.
//
//	hub                                            spoke
//	 hub-etcd, hub-apiserver                        spoke-etcd, spoke-apiserver
//	 hub-controller-manager (garbage collection)    spoke-controller-manager, spoke-scheduler
//	 cluster-api (the real manager, its webhooks)   spoke-kwok (heartbeats and pods of the Nodes)
//	 sim-provider (infrastructure provider)         shim (Karpenter)
//	 agent
//
// The hub holds one Cluster, [ClusterNamespace]/[ClusterName], whose control plane is the spoke. There are no
// MachineDeployments: whoever uses the sandbox makes those, from SimMachineTemplates (package api/v1alpha1), which also
// say how the machines behave. The example in examples/machinedeployment.yaml works as it stands.
//
// With [Options].HubOnly there is a hub only, without a Cluster: another sandbox's Cluster can be moved to it with `clusterctl move`, and
// that one's shim pointed to its agent with [Sandbox.PointShim].
//
// With [Options].HubOf there is a spoke with its shim only, whose Cluster is added to the hub of another sandbox.
//
// # Fidelity
//
// Agent and shim are processes of their own that speak mTLS, with a ServiceAccount token each, bound to exactly the
// roles that the Helm charts grant. Cluster API runs with its admission and conversion webhooks. What is simulated is
// the machine and its kubelet: the provider keeps Cluster API's contract (it waits, hangs and fails where a real one
// does, and knows an instance again whose object was moved), registers Nodes as kubelets do, and stops them when their
// machine stops. Everything else, such as the garbage collection of Nodes' pods or the taint of a Node that is not
// heard of, is Kubernetes' own doing.
//
// # Processes
//
// Every component is started again when it dies, after a short and growing delay, so that one may be killed by hand or
// with [Sandbox.Kill]; [Sandbox.StopComponent] keeps it down. No process outlives the one that called [Start], even if
// that is killed with no chance to clean up (on Linux). Every server listens on loopback only, on ports that are free;
// any number of sandboxes of different names can run at once. State lives in one folder per sandbox ([Paths]).
//
// The binaries come from `make tools build`; [Start] says which are missing.
package sandbox
