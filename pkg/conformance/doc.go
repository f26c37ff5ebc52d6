// Package conformance tests the contract of the agent's API. The same cases run against the fake
// agent and the real one, so that the fake does not promise what the agent does not keep.
//
// [Run] runs every case as a subtest. Each gets its own [Env]: an agent and a hub whose
// infrastructure the test drives. What a case asserts is specified by the API's comments. Where the
// contract is open (whether a claim is bound before its machine is provisioned, how soon a spare
// machine is removed), the cases accept every outcome.
//
// [Check] runs the same cases outside of Go tests and returns a [Verdict]. The command
// capi-agent-conformance uses it. Each case checks one [Behaviour], whose ID never changes, and
// declares what it needs. On [Given], an agent that the suite has no control over, cases that need
// control are skipped. Package control lets an agent in another process offer that control.
package conformance
