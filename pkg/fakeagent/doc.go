// Package fakeagent is an agent within the test's own process. It serves the agent's API, the
// package capi.agent.v1alpha1, over an in-memory connection. The test plays the hub behind it.
//
// [New] starts an agent. [Agent.Client] returns a client that may act for every Cluster,
// [Agent.ClientFor] a client with the identity of a single Cluster, and [Agent.Dial] a raw
// connection. The responses are those of the real agent: the conformance suite (package
// conformance) runs the same cases against both.
//
// # The hub
//
// [Agent.AddNodeGroup] adds a node group as the API shows it, [Agent.AddMachineDeployment] as a
// user writes it. A claim creates a machine. [Infrastructure] determines how far machines progress
// by themselves: each step happens after a delay, or if it is [Manual], when the test calls
// [Agent.Appear], [Agent.Provision], [Agent.Join] or [Agent.Terminate]. By default machines appear
// at once, wait for the test to provision and join them, and terminate at once.
//
// [Agent.ApplyNodePoolSet] publishes NodePools and NodeClasses to a Cluster, and
// [Agent.ReportedNodePools] returns what its shim reports of them.
//
// # Faults
//
// [Agent.Fail] and [Agent.FailAfter] make calls fail, before or after they have had an effect.
// [Agent.Delay] slows calls down. [Agent.SetSynced] makes the agent's view incomplete.
// [Agent.SetPaused] pauses a Cluster. [Agent.DropStreams], [Agent.FreezeStreams] and [Agent.Resync]
// disturb watches. [Agent.FailMachine] and [Agent.LoseMachine] disturb machines. [Agent.GiveUp] and
// [Agent.TimeOut] trigger the agent's own decisions about machines. [Agent.FailMachines] plans all
// of that in advance. [Agent.Silence] leaves every call without an answer. [Agent.Calls] and
// [Agent.Requests] report the calls that were received.
//
// # Roles
//
// [Agent.ClientAs] returns a client with any identity. [Agent.ServeTLS] takes the identity of each
// connection from its client certificate. [Rules] are the agent's roles: they determine which
// identity may call which method.
//
// # Certificates
//
// Connections have no TLS unless [Agent.ServeTLS] is used. [Agent.Onboard] nevertheless makes the
// agent issue certificates for a Cluster, to test code that requests and stores them. They are
// signed by the agent's own authority, or by that of [WithAuthority]. The Cluster's own identity
// can request the first certificate too, and a bootstrap certificate may be used with any number of
// keys.
//
// # Limitations
//
// There are no rollouts, no MachineSets, no learned capacity, and no races between agents: calls
// are applied one after the other. A spare machine is removed as soon as no claim waits for it,
// unless [WithSpareGracePeriod] is set. The protocol of a stock cluster-autoscaler is not served. A
// NodePoolSet selects one Cluster, and reports about NodePools are accepted at any rate. Streams do
// not end with their caller's rights: neither when its certificate expires nor when [Agent.Onboard]
// changes the onboarding. A Cluster without an onboarding accepts identities without one, also
// after it had one.
//
// Delays and heartbeats follow the clock of [WithClock].
package fakeagent
