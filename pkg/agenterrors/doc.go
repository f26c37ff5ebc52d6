// Package agenterrors creates and reads the errors of the agent's API.
//
// All API errors are created by the constructors of this package, both by the agent and by the
// fake, so that codes, reasons and details have a single definition. Callers read them with the
// predicates, which accept any error that wraps a gRPC status, from any connection.
//
// An error carries a gRPC code, which determines the possible kind of recovery, and a
// google.rpc.ErrorInfo of the [Domain], whose reason is the exact cause. Some reasons have further
// details: an ErrorInfo for each of the first candidates ([Rejections]), how a claim ended
// ([EndedAs]), the invalid fields ([FieldViolations]), and when to retry ([RetryDelay]).
package agenterrors
