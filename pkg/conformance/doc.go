// Package conformance tests the contract of the agent's API. The same cases run against the fake
// agent and the real one, so that the fake does not promise what the agent does not keep.
//
// [Run] runs every case as a subtest. Each gets its own [Env]: an agent and a hub whose
// infrastructure the test drives. What a case asserts is specified by the API's comments. Where the
// contract is open (whether a claim is bound before its machine is provisioned, how soon a spare
// machine is removed), the cases accept every outcome.
package conformance
