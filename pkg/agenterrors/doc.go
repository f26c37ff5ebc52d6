// Package agenterrors makes and reads the errors of the agent's API.
//
// Every error that goes over the wire is made by a constructor of this package, by the agent as by the fake, so that codes,
// reasons and details have one definition. Callers read them with the predicates, which take any error that wraps a gRPC
// status, from whatever connection it came.
//
// An error carries a gRPC code, which says what kind of recovery is possible, and a google.rpc.ErrorInfo of the [Domain],
// whose reason says exactly what happened. Details that go with some reasons: one ErrorInfo for each candidate
// ([Rejections]), how a claim ended ([EndedAs]), the fields at fault ([FieldViolations]), and when to try again
// ([RetryDelay]).
package agenterrors
