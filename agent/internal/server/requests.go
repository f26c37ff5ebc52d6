package server

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	middleware "github.com/grpc-ecosystem/go-grpc-middleware/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	protocodec "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/karpenter-capi/karpenter-capi/agent/internal/authz"
	"github.com/karpenter-capi/karpenter-capi/agent/internal/limits"
	"github.com/karpenter-capi/karpenter-capi/pkg/agenterrors"
	"github.com/karpenter-capi/karpenter-capi/pkg/validation"
	agentv1alpha1 "github.com/karpenter-capi/karpenter-capi/proto/capi/agent/v1alpha1"
	"github.com/karpenter-capi/karpenter-capi/proto/clusterautoscaler/externalgrpc"
)

// The generated handlers of unary calls decode a request before they call any interceptor, and a
// server has a single size limit for the messages of all its methods. This file changes both.
// Checks that need only the caller and the method run before the body is read. The body is read
// only if the size that it announces is within the method's limit, and decoded only once its number
// of elements is known to be within the limits of the API.
//
// grpc.InTapHandle also runs before the body is read, but is not suited to reject calls: the timer
// of each rejected call keeps running for the time-out that its caller chose.

const (
	// maxMessageBytes is the size limit of a request of the methods in largeRequests.
	maxMessageBytes = 4 << 20
	// maxSmallMessageBytes is the size limit of most requests. A CreateClaim request with a
	// thousand candidates is half as large.
	maxSmallMessageBytes = 256 << 10
	// maxOpenMessageBytes is the size limit of the requests that every caller may send, whatever
	// its rights. They have a name at most, and a health watch keeps it for as long as it is open.
	maxOpenMessageBytes = 4 << 10
)

// largeRequests lists the methods whose requests grow with the size of a Cluster.
var largeRequests = []string{
	agentv1alpha1.ClaimService_SyncClaims_FullMethodName,
	// The nodes come with all their labels and annotations.
	externalgrpc.CloudProvider_NodeGroupDeleteNodes_FullMethodName,
}

// maxBytes returns the size limit of a method's requests.
func maxBytes(method string) int {
	rule := authz.Methods[method]
	switch {
	case slices.Contains(largeRequests, method):
		return maxMessageBytes
	case rule.Anyone || rule.Everyone:
		return maxOpenMessageBytes
	default:
		return maxSmallMessageBytes
	}
}

// body is a request as received, still encoded.
type body struct{ mem.Buffer }

// codec is gRPC's own codec. It also accepts a response that is already encoded.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(protocodec.Name)} }

func (c codec) Marshal(message any) (mem.BufferSlice, error) {
	if encoded, ok := message.(mem.BufferSlice); ok {
		return encoded, nil
	}
	return c.CodecV2.Marshal(message)
}

// messageReader is the part of the transport's stream from which gRPC reads messages. gRPC knows no
// limit by method, and would read a message before the limit could be checked.
type messageReader interface {
	ReadMessageHeader(header []byte) error
	Read(bytes int) (mem.BufferSlice, error)
}

// messageHeader is the length of what precedes a message: whether it is compressed, and its size.
const messageHeader = 5

// readMessage reads the next message of a call into raw. It reads nothing of a message that is
// larger than its method's requests may be. Unless the caller may send several, there must be
// exactly one, as the generated handlers expect. After the last of several, it returns [io.EOF].
func readMessage(ctx context.Context, method string, several bool, raw *body) error {
	stream, ok := grpc.ServerTransportStreamFromContext(ctx).(messageReader)
	if !ok {
		return grpcstatus.Error(codes.Internal, "the transport does not read messages")
	}
	var header [messageHeader]byte
	switch err := stream.ReadMessageHeader(header[:]); {
	case errors.Is(err, io.EOF) && !several:
		return grpcstatus.Error(codes.Internal, "the call has no request")
	case err != nil:
		return cutShort(err)
	}
	if header[0] != 0 {
		return errCompressed
	}
	size, most := int64(binary.BigEndian.Uint32(header[1:])), maxBytes(method)
	if size > int64(most) {
		return agenterrors.TooLarge(fmt.Sprintf("the request has %d bytes; this method takes at most %d", size, most))
	}
	data, err := stream.Read(int(size))
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return cutShort(err)
	}
	defer data.Free()
	if !several {
		switch err := stream.ReadMessageHeader(header[:]); {
		case err == nil:
			return grpcstatus.Error(codes.Internal, "the call has more than one request")
		case !errors.Is(err, io.EOF):
			return cutShort(err)
		}
	}
	raw.Buffer = data.MaterializeToBuffer(mem.DefaultBufferPool())
	return nil
}

// cutShort is the answer to a call whose request ends too early. The transport's other errors are
// answers already.
func cutShort(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return grpcstatus.Error(codes.Internal, "the request is truncated")
	}
	return err
}

// receiver reads requests.
type receiver struct {
	validator *validation.Validator
	// timeout is how long a request may take to arrive.
	timeout time.Duration
}

// receive reads one message when it is the call's turn, and decodes it into into. next reads the
// call's next message, still encoded.
func (r receiver) receive(ctx context.Context, method string, next func(*body) error, into any) error {
	message, ok := into.(proto.Message)
	if !ok {
		return grpcstatus.Errorf(codes.Internal, "%T is no message", into)
	}
	raw, err := r.read(ctx, method, next)
	if err != nil {
		return err
	}
	defer raw.Free()
	// Before it is decoded: a request that waits is smaller while it is encoded.
	switch call := limits.FromContext(ctx); {
	case method == agentv1alpha1.ClaimService_SyncClaims_FullMethodName:
		if err := call.Sync(ctx, raw.Len(), func() { cut(ctx) }); err != nil {
			return throttled(ctx, err)
		}
	case slices.Contains(largeRequests, method):
		done, err := call.Decode(ctx)
		if err != nil {
			return throttled(ctx, err)
		}
		defer done() // little of it remains, see excerpts
	}
	encoded, err := needed(method, raw.ReadOnlyData())
	if err != nil {
		return err
	}
	if err := r.validator.CheckEncoded(message.ProtoReflect().Descriptor(), encoded); err != nil {
		return err
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(encoded, message); err != nil {
		return grpcstatus.Error(codes.InvalidArgument, notOfMethod)
	}
	return nil
}

// read reads one encoded message when it is the call's turn.
func (r receiver) read(ctx context.Context, method string, next func(*body) error) (*body, error) {
	call := limits.FromContext(ctx)
	done, err := call.Read(ctx, slices.Contains(largeRequests, method))
	if err != nil {
		return nil, throttled(ctx, err)
	}
	defer done()
	timer := time.AfterFunc(r.timeout, func() { cut(ctx) })
	defer timer.Stop()
	var raw body
	if err := next(&raw); err != nil {
		return nil, err
	}
	if err := call.Hold(raw.Len()); err != nil {
		raw.Free()
		return nil, throttled(ctx, err)
	}
	return &raw, nil
}

// registrar registers services whose unary calls pass through an interceptor before their request
// is read.
type registrar struct {
	*grpc.Server

	before   grpc.UnaryServerInterceptor
	receiver receiver
}

// RegisterService implements [grpc.ServiceRegistrar].
func (r registrar) RegisterService(service *grpc.ServiceDesc, implementation any) {
	guarded := *service
	guarded.Methods = make([]grpc.MethodDesc, 0, len(service.Methods))
	for _, method := range service.Methods {
		guarded.Methods = append(guarded.Methods, grpc.MethodDesc{
			MethodName: method.MethodName,
			Handler:    r.guard("/"+service.ServiceName+"/"+method.MethodName, method.Handler),
		})
	}
	r.Server.RegisterService(&guarded, implementation)
}

func (r registrar) guard(method string, handler grpc.MethodHandler) grpc.MethodHandler {
	return func(
		implementation any, ctx context.Context, _ func(any) error, after grpc.UnaryServerInterceptor,
	) (any, error) {
		info := &grpc.UnaryServerInfo{Server: implementation, FullMethod: method}
		return r.before(ctx, nil, info, func(ctx context.Context, _ any) (any, error) {
			next := func(raw *body) error { return readMessage(ctx, method, false, raw) }
			return handler(implementation, ctx, func(into any) error { return r.receiver.receive(ctx, method, next, into) }, after)
		})
	}
}

// boundMessages is the outermost interceptor of streaming calls: all others see the messages that
// it reads, each into a [body].
func boundMessages(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return handler(service, &boundedStream{ServerStream: stream, info: info})
}

type boundedStream struct {
	grpc.ServerStream

	info *grpc.StreamServerInfo
}

func (s *boundedStream) RecvMsg(into any) error {
	raw, ok := into.(*body)
	if !ok {
		return grpcstatus.Errorf(codes.Internal, "%T is no encoded message", into)
	}
	return readMessage(s.Context(), s.info.FullMethod, s.info.IsClientStream, raw)
}

// stream makes streaming calls read their requests in the same way.
func (r receiver) stream(service any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	return handler(service, &receivingStream{
		WrappedServerStream: &middleware.WrappedServerStream{ServerStream: stream, WrappedContext: stream.Context()},
		receiver:            r, method: info.FullMethod,
	})
}

type receivingStream struct {
	*middleware.WrappedServerStream

	receiver receiver
	method   string
	// messages is how many messages have been received.
	messages int
}

func (s *receivingStream) RecvMsg(into any) error {
	call := limits.FromContext(s.Context())
	// A stream may stay open for hours after its request.
	defer call.Free()
	next := func(raw *body) error {
		if err := s.WrappedServerStream.RecvMsg(raw); err != nil {
			return err
		}
		if s.messages++; s.messages == 1 { // the call itself has been counted
			return nil
		}
		if err := call.Again(); err != nil {
			raw.Free()
			return throttled(s.Context(), err)
		}
		return nil
	}
	return s.receiver.receive(s.Context(), s.method, next, into)
}

// chain combines several interceptors into one. The first is the outermost.
func chain(interceptors ...grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		for _, interceptor := range slices.Backward(interceptors) {
			next := handler
			handler = func(ctx context.Context, request any) (any, error) { return interceptor(ctx, request, info, next) }
		}
		return handler(ctx, request)
	}
}
