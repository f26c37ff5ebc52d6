// Package conformance is the agent API's contract as tests: the same cases run against the fake agent and against the real one,
// so that the fake cannot promise what the agent does not keep.
//
// [Run] runs every case as a subtest, each in an [Env] of its own: an agent with a hub behind it whose infrastructure the test
// drives. What a case asserts is in the API's comments; where the contract leaves freedom (whether a claim is bound before its
// machine is provisioned, how soon a spare machine goes) the cases leave it too.
//
// [Check] runs the same cases outside of Go tests, as the command capi-agent-conformance does, and returns a [Verdict]. Each case
// checks one [Behaviour], whose id never changes, and says what it needs: on [Given], an agent that the suite has no control over,
// those that need one are skipped. Package control is how an agent in another process offers one.
package conformance
