// Package faults provides a proxy between an agent and the hub's API server that injects faults:
// the agent is killed just before or just after a write, answers get lost, the server refuses
// requests, watches stall or expire.
//
// The agent under test is the product's own binary and does not know about the proxy: its
// kubeconfig names the [Proxy] as its server. The proxy sees every write and determines from its
// content which step of the claim protocol it is (see [Memory.Classify]), so that faults can target
// steps. It reports unknown writes: a new write in the protocol needs a class here. A proxy for
// TCP, such as toxiproxy, knows neither requests nor watches.
package faults
