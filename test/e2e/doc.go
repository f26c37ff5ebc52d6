// Package e2e tests the whole product on one sandbox that its tests share, one after the other:
// real control planes, the real Cluster API, agent and shim as separate processes with the charts'
// permissions. A test that disconnects Cluster API from its cluster uses its own sandbox.
//
// Each test leaves the sandbox as it found it, which is checked together with all invariants. `go
// test -short` runs the tests that fit into four minutes; the others take longer or measure.
package e2e
