// Package simprovider is the simulated infrastructure provider: the controllers of SimMachineTemplate, SimMachine,
// SimCluster, SimControlPlane and SimBootstrapConfig. What follows is of machines.
//
// To Cluster API it is a provider like any other. It keeps the contract: it waits for the owning Machine and its
// bootstrap data, holds a finalizer, honours paused objects, reports a providerID once the instance exists, and leaves
// the deletion of the Node to Cluster API. A Node that Cluster API never saw goes with its instance all the same, as there is no cloud
// controller manager, which would see to that. To the workload cluster it is the part of a kubelet that registers a Node and
// reports its status; the other part, heartbeats and pods, is kwok's for as long as the Node carries [KubeletLabel].
//
// An instance's life is computed from its spec, the times recorded in its status and the clock (see [lifecycle]), so
// the provider may be restarted at any point.
package simprovider
