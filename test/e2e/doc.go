// Package e2e tests the whole product on one sandbox that all its tests share, one after the other: real control planes,
// the real Cluster API, agent and shim as processes of their own with the charts' permissions. A test that cuts Cluster API
// off from its cluster has a sandbox of its own.
//
// Each test leaves the sandbox as it found it, which is checked, and all invariants with it. `go test -short` runs what
// fits into four minutes; the rest takes longer or is about numbers.
package e2e
