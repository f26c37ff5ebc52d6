// Package simprovider is the simulated infrastructure provider: the controllers of
// SimMachineTemplate, SimMachine, SimCluster, SimControlPlane and SimBootstrapConfig. The following
// describes its machines.
//
// To Cluster API it is a provider like any other, and keeps the contract. It waits for the owning
// Machine and its bootstrap data, holds a finalizer, honours paused objects, reports a providerID
// once the instance exists, and leaves the deletion of the Node to Cluster API. It does delete the
// Node of an instance that is gone if Cluster API never saw that Node, since there is no cloud
// controller manager to do so. Cluster API's own in-memory provider has neither capacities, zones
// nor failures.
//
// To the workload cluster it is the part of a kubelet that registers a Node and reports its status.
// The other part, heartbeats and pods, is provided by kwok while the Node has the label
// [KubeletLabel].
//
// An instance's life is computed from its spec, the times recorded in its status, and the clock
// (see [lifecycle]). The provider may therefore be restarted at any point.
package simprovider
