// Package fakeagent is an agent in the test's own process: every service of the agent's API, over an in-memory connection,
// with the hub behind it played by the test.
//
// [New] starts one. [Agent.Client] gives a client that may act for every Cluster, [Agent.ClientFor] one with the identity of a
// single Cluster, and [Agent.Dial] the bare connection. Answers are those of the real agent: the conformance suite (package
// conformance) runs the same cases against both.
//
// # The hub
//
// [Agent.AddNodeGroup] adds a node group as the API shows it, [Agent.AddMachineDeployment] as a user writes it. A claim makes
// a machine, and how far machines get by themselves is up to [Infrastructure]: each step happens after a delay, or only when
// the test says so ([Manual]) with [Agent.Appear], [Agent.Provision], [Agent.Join] and [Agent.Terminate]. By default
// machines appear at once, wait for the test to provision and join them, and terminate at once.
//
// # Trouble
//
// [Agent.Fail] and [Agent.FailAfter] answer calls with errors, before the call had any effect or after it; [Agent.Delay] slows
// calls down; [Agent.SetSynced] takes the agent's view away; [Agent.SetPaused] pauses a Cluster; [Agent.DropStreams],
// [Agent.FreezeStreams] and [Agent.Resync] disturb watches; [Agent.FailMachine] and [Agent.LoseMachine] disturb machines;
// [Agent.GiveUp] and [Agent.TimeOut] are the agent's own judgement of them; [Agent.FailMachines] plans all of that ahead. [Agent.Silence] leaves
// everything without an answer. [Agent.Calls] and [Agent.Requests] tell what was asked.
//
// # Roles
//
// [Agent.ClientAs] gives a client with any identity, and [Agent.ServeTLS] takes the identity of each connection from its client certificate. Who may
// call what is in [Rules]: the agent's roles.
//
// # Certificates
//
// Connections have no TLS unless [Agent.ServeTLS] is used. [Agent.Onboard] makes the agent issue certificates for a Cluster all the same, signed
// by an authority of its own or that of [WithAuthority], so that who asks for them and stores them can be tested. The Cluster's own identity gets
// the first as well, and a bootstrap certificate may be used with any number of keys.
//
// # What it leaves out
//
// Rollouts, several MachineSets, learned capacity, and races between agents: calls are applied one after the other. A machine
// that is spare is taken away as soon as no claim waits for it, unless [WithSpareGracePeriod] says otherwise.
//
// Delays and heartbeats follow the clock of [WithClock].
package fakeagent
