// Package capitest runs tests against a real API server that behaves as if Cluster API's controllers ran beside it.
//
// [StartControlPlane] starts etcd and kube-apiserver with Cluster API's own CRDs, those of this module, and one
// infrastructure template kind. [Run] adds a model of the MachineDeployment, MachineSet and Machine controllers that keeps
// to the parts of their behaviour that decide which Machine lives and which dies: victims are chosen by the same
// priorities, deleting Machines occupy replica slots, MachineSets are charged in the same order, caches lag behind writes,
// and a deletion goes through the same reasons of the Deleting condition. How the infrastructure behaves is scripted with
// [Behaviour].
//
// It is a model: no drain, no bootstrap, no workload cluster, no webhooks. The end-to-end tests run the real controllers.
package capitest
