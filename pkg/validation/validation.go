// Package validation checks requests against the constraints in the API's proto files before a
// handler sees them. The agent and the fake use the same interceptors, so that they reject the same
// requests with the same messages.
//
// protovalidate checks the constraints. The interceptor around it is written by hand because that
// of go-grpc-middleware returns protovalidate's own details instead of a BadRequest.
package validation

import (
	"context"
	"errors"
	"fmt"

	"buf.build/go/protovalidate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
)

// Validator checks requests. It is safe for concurrent use.
type Validator struct {
	validator protovalidate.Validator
	counts    counts
}

// New returns a Validator.
func New() (*Validator, error) {
	// The check stops at the first violation. A request of a few MiB can contain millions, each of
	// which would need a thousand bytes.
	validator, err := protovalidate.New(protovalidate.WithFailFast())
	if err != nil {
		return nil, fmt.Errorf("preparing request validation: %w", err)
	}
	return &Validator{validator: validator, counts: counts{messages: map[protoreflect.FullName]messageCounts{}}}, nil
}

// Check returns nil if the message satisfies its constraints, and otherwise INVALID_ARGUMENT with
// the first field that does not. A value that is not a proto message passes.
func (v *Validator) Check(request any) error {
	message, ok := request.(proto.Message)
	if !ok {
		return nil
	}
	err := v.validator.Validate(message)
	if err == nil {
		return nil
	}
	var invalid *protovalidate.ValidationError
	if !errors.As(err, &invalid) {
		return status.Errorf(codes.Internal, "validating the request: %v", err)
	}
	violations := make([]agenterrors.FieldViolation, 0, len(invalid.Violations))
	for _, violation := range invalid.Violations {
		violations = append(violations, agenterrors.FieldViolation{
			Field:       protovalidate.FieldPathString(violation.Proto.GetField()),
			Description: violation.Proto.GetMessage(),
		})
	}
	return agenterrors.InvalidArgument(violations...)
}

// Unary checks the requests of unary calls.
func (v *Validator) Unary() grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if err := v.Check(request); err != nil {
			return nil, err
		}
		return handler(ctx, request)
	}
}

// Stream checks each message that a streaming call receives.
func (v *Validator) Stream() grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		return handler(server, &checkedStream{ServerStream: stream, validator: v})
	}
}

type checkedStream struct {
	grpc.ServerStream

	validator *Validator
}

func (s *checkedStream) RecvMsg(message any) error {
	if err := s.ServerStream.RecvMsg(message); err != nil {
		return err
	}
	return s.validator.Check(message)
}
