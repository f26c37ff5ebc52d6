// Package chaos runs the product on real control planes while what it depends on is made to fail, and counts what may not
// happen: Machines that leaked, were claimed twice, or were taken from somebody, and node groups that do not come to rest.
//
// It brings a sandbox up whose agents reach the hub through the proxies of package faults. Claims are made and released over
// gRPC, as many spokes would; one scenario uses real Karpenter. A connection of its own, without a proxy, judges every
// deletion of a Machine as it happens (package invariants); when the faults are over, everything has to come to rest within
// two minutes, with exactly the machines that people and holders of claims know to be theirs.
package chaos
