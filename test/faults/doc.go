// Package faults stands between an agent and the hub's API server and makes go wrong there what can go wrong: the agent dies
// just before or just after a write, answers get lost, the server refuses, watches stall or expire.
//
// The agent under test is the product's own binary and knows nothing of it: its kubeconfig names the [Proxy]. The proxy sees
// every write and tells by its content which step of the claim protocol it is (see [Classify]), so that faults can be aimed
// at steps. A write that it does not know is reported: whoever adds a write to the protocol has to add its class here.
package faults
