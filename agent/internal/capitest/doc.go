// Package capitest runs tests against a real API server that behaves as if Cluster API's
// controllers were running.
//
// [StartControlPlane] starts etcd and kube-apiserver with the CRDs of Cluster API and of this
// module, and one infrastructure template kind. [Run] adds a model of the MachineDeployment,
// MachineSet and Machine controllers. The model reproduces the behaviour that decides which Machine
// survives: victims are chosen by the same priorities, Machines being deleted occupy replica slots,
// MachineSets are charged in the same order, caches lag behind writes, and a deletion passes
// through the same reasons of the Deleting condition. [Behaviour] scripts the infrastructure.
//
// It is only a model: it has no drain, bootstrap, workload cluster or webhooks. The end-to-end
// tests run the real controllers.
//
// Cluster API's own reconcilers are not used, although it exports them: they need a workload
// cluster, and a bootstrap and an infrastructure provider, and reconcile an object once a second at
// most, which is too slow for tests of many claims.
package capitest
