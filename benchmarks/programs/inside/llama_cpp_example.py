import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = "exports/chat-gguf/chat-gguf.gguf"
server = xllamacpp.Server(params)
completion = server.handle_completions({"prompt": "The", "max_tokens": 20})
chat = [{"role": "user", "content": "Hello"}]
reply = server.handle_chat_completions({"messages": chat, "max_tokens": 20})
print(completion["choices"][0]["text"], reply["choices"][0]["message"]["content"])
